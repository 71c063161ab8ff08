"""Data, training, and the experiments that test the paper's claims."""
