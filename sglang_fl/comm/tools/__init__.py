"""What the self-test and the benchmark of the communication layer share."""
