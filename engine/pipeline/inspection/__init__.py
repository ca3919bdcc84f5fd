"""The model under FakeTensorMode: shapes, dtypes, draws and changes, found without computing anything."""
