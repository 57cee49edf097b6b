//! [`setters`]: a method for each field of options, so that later versions can add fields.

/// Implements for options a method for each field, which sets the field.
macro_rules! setters {
    ($options:ident { $($field:ident: $type:ty),* $(,)? }) => {
        impl $options {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](field@Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

pub(crate) use setters;
