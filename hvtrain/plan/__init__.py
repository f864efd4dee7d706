"""`python -m hvtrain plan` forecasts a run on many ranks; `allreduce` measures links for its cost model."""
