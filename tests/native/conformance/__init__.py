"""One matrix of cases that every library with FlagCX's C API must pass, on host or on device memory."""
