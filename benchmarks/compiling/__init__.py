"""The cost of compiling, models that compile whole, and launches of training steps."""
