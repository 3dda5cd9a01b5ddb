"""Training on several GPUs of one host."""
