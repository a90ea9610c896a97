"""The plugins inside an SGLang server (push.py), and the process group of a push (weight_group.py).

SGLang loads them in every process of a server (entry point `areal_lite`, push.py:install).
"""

ENV_API_KEY = "AREAL_LITE_SERVER_API_KEY"
ENV_DEVICE = "AREAL_LITE_SERVER_DEVICE"  # cpu, or unset where there is a GPU
ENV_NAME = "AREAL_LITE_SERVER_NAME"
ENV_STORE = "AREAL_LITE_STORE"
"""The trajectory store of the run, unset where another machine writes it: SQLite needs one host."""
ENV_READBACK = "AREAL_LITE_READBACK"
"""With the value 1, servers answer `/get_weights_by_name` for every architecture."""
installed = False  # whether SGLang has found the plugins in this process
