"""The plugins inside an SGLang server: push.py for weights, sampling.py for tokens.

SGLang loads the plugins in every process of a server (entry point `areal_lite`, push.py:install).
They are hooks around SGLang's own functions. weight_group.py is the process group of a push; the
trainer uses it, too.
"""

ENV_READBACK = "AREAL_LITE_READBACK"
"""With the value 1, servers answer `/get_weights_by_name` for every architecture."""
installed = False
"""Whether SGLang has found the plugins in this process."""
