"""Turns an FX graph into MAX graphs: partition, layout, builder."""
