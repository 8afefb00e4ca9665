"""One rank is killed, stopped or raises, at every point of a group's life: the others end in time and say who."""
