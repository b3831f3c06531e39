"""A worker of a bench for the tests: does what its first argument says."""

import argparse
import sys
import time

from jaxserve.bench.workers import writing

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--result", required=True)
options = parser.parse_args()
if options.mode == "fail":
    sys.exit("no luck")
if options.mode == "sleep":
    time.sleep(600)
with writing(options.result) as result:
    result["mode"] = options.mode
