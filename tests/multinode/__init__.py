"""Tests on two hosts: namespaces of this machine, each with a network, a name and a /dev/shm of its own."""
