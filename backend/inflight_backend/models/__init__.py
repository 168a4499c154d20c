"""From a checkpoint to the layers of a decoder, and the operations they are made of."""
