"""What lies between the products of a layer, in a form for any device and one for the CPU."""
