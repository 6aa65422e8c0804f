"""What rewriting passes share: the data flow of a step, autograd's nodes in it, and taking gradients out of it."""
