"""A vendor's backend, written to the public plugin's recipe to the letter; the tests put it in both of its places."""
