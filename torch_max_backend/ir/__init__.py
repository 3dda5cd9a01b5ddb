"""Operations and values of MAX graphs: values carry their memory order."""
