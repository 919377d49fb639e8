"""`python -m amphora`."""

import sys

from amphora.cli import main

sys.exit(main())
