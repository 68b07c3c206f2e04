"""The model: parameters, layers, and the compiled steps that run them on the paged store."""
