import sys

from fold_attention.cli import main

sys.exit(main())
