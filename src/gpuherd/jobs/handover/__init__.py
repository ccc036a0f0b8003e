"""Jobs of a queue, handed to an engine beyond this machine, followed there, and collected.

``handover`` is the loop; ``decision`` says what goes next, ``meaning`` what a sighting means (both pure); ``manifest``
is what a node is told, ``reports`` what it tells, and ``node`` the program that leads one attempt there. The queue is
written by one host only: everything that comes from elsewhere comes in files that are renamed into place.
"""
