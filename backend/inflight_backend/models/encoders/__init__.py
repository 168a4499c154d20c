"""What reads the prompt in models with an encoder and a decoder, and the cache of its answers."""
