"""Print the environment of this process as JSON: the module of a rank in test_roles.py."""

import json
import os

print(json.dumps(dict(os.environ)))
