"""The algorithms, a file each. ``interface`` says what each has, ``registry`` which there are."""
