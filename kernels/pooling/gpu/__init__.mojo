"""Pooling on any GPU: disjoint windows, halo exchange between lanes, scattering into shared memory, gathering."""
