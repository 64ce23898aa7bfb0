"""`python -m assc report`: one self-contained HTML page out of results. Needs the extra `report`; never torch."""
