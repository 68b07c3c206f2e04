"""Operations on the paged store, one folder each, and the byte format of the rows they touch."""
