"""Axes of the design space, one module each. A module holds pure functions and the callbacks that call them."""
