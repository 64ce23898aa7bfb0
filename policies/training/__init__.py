"""What joins environments and learners; nothing here is needed to run a trained policy.

`job.train` is the main job: `setup` prepares what is played, `sb3` and `online` learn on it (`play` is what they step,
`checkpoint` what a resumed run starts from, `log` what is shown), `report` compares the result with baselines.
"""
