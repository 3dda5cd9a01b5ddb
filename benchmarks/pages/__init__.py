"""Tables and charts of the pages, made from the result files."""
