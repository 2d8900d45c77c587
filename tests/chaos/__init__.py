"""A small cluster in namespaces that things are done to while it serves. Needs root."""
