"""Tools for tests: launchers and tiny models; nothing outside tests, benchmarks and the demo imports them."""
