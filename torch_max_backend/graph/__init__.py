"""From an FX graph to MAX graphs: partition, layout, builder."""
