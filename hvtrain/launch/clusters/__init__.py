"""Job files for schedulers, one module for each."""
