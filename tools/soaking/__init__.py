"""The parts of tools/soak.py: a real server under load, and what must hold of it."""
