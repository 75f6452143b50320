from faults.commit_machine import run_machine
from faults.launcher import Launcher
import time, sys
def test_x(tmp_path):
    launcher = Launcher(tmp_path, ready_for="faults.commit_job")
    tally = {}
    t=time.time()
    try:
        run_machine(launcher, seed_text="1/2", num_runs=12, num_steps=50, tally=tally)
    finally:
        launcher.close()
        print(tally, time.time()-t)
