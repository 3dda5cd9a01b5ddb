"""What compiling costs, and which models compile whole."""
