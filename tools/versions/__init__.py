"""What tools/check_versions.py is made of."""
