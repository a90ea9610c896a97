import sys

from areal_lite.cli import main

sys.exit(main())
