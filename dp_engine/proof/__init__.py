"""What `dp_engine.explore` and `dp_engine.simulation` stand on: the real rank with everything around it pretended."""
