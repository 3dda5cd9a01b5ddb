"""Finding attention that a model writes out, and replacing it by one operator."""
