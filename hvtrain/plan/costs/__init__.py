"""What a step costs on many ranks, on paper: links, allreduce, fusion, overlap, stragglers. Pure, no dependencies."""
