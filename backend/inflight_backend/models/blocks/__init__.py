"""The parts of a decoder, one file each: rotary embedding, norms, attention, feed-forward."""
