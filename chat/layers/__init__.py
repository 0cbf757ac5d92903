"""Our cache layers, one module per way of holding rows.

`contract` says what every layer of ours that holds one row per token can do; `KVCache` relies on nothing
else. `factory.layer_for` is the only place that chooses among them.
"""
