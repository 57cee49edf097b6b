//! [`setters`]: a method for each field of options, so that later versions can add fields; and [`serde_as_text`].

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

/// Implements serde for types with `Display` and `FromStr`, so that what a program has kept is checked when it is read again.
macro_rules! serde_as_text {
    ($name:ty) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(
                deserializer: D,
            ) -> std::result::Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str> as serde::Deserialize>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

pub(crate) use {serde_as_text, setters};
