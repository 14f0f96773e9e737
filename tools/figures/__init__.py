"""The drawings of docs/images, each a function that gives SVG text; tools/draw_figures.py writes them."""
