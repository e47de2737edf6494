"""Formats of annotations, a module each. A new one is a module with `find(place)` and a line in annotations.FORMATS."""
