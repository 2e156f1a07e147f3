"""Measurements of wqk against plain dense products and the machine's own limits."""
