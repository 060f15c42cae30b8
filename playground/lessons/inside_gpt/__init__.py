"""Inside a GPT: the shapes, parameters, activations and operations of a block, counted."""
