"""Write the data of a demo: `python launch/demo_data.py tool|game|vision|notes DIR`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmdrl.tools.demo_data import main

sys.exit(main())
