"""Quantised checkpoints: how ``config.json`` describes them, what files hold, what is computed.

A linear is chosen by its scheme, whatever its family is: `configs` reads ``quantization_config``,
`schemes` says which linears it is for, `stored` which tensors a linear then has, `unpacking` makes
a `forms.PackedWeight` of them, and `linears` multiplies by it.
"""
