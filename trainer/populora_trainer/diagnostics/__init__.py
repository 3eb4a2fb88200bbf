"""What a run shows of itself: program complexity, the archive of behaviours, step metrics, exposition and the report.

Reads plain values and a run's files; must not import the loop, the command line or torch.
"""
