"""What a MAX graph is made of, as everything that builds one uses it: operations, and values with a memory order."""
