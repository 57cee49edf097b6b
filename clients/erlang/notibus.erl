%% Records events of databases for Notibus, inside your own FoundationDB transactions. Copy this file.
%%
%%   Config = erlfdb:get(Db, notibus:config_key(Prefix)),
%%   {ok, Recorder} = notibus:recorder(Prefix, Config),
%%   erlfdb:transactional(Db, fun(Tx) ->
%%       erlfdb:set(Tx, Key, Document),
%%       [apply_to(Tx, Mutation) || Mutation <- notibus:mutations(Recorder, <<"shop/orders">>, Instance, #{updated => 1}, 0)]
%%   end),
%%   erlfdb:transactional(Db, fun(Tx) -> apply_to(Tx, notibus:doorbell(Recorder, <<"shop/orders">>)) end). % a hint, which may fail
%%
%%   apply_to(Tx, {add, Key, Operand}) -> erlfdb:atomic_op(Tx, Key, add, Operand);
%%   apply_to(Tx, {set_versionstamped_value, Key, Operand}) -> erlfdb:atomic_op(Tx, Key, set_versionstamped_value, Operand).
%%
%% docs/protocol.md says what is written and why. As a program, this file answers the questions of tests/protocol.rs, one line each.
-module(notibus).
-export([config_key/1, recorder/2, partition/2, mutations/5, doorbell/2, xxh3/1, main/1]).

-define(FORMAT, 6).
-define(CUT(N), ((N) band 16#FFFFFFFFFFFFFFFF)).
-define(P64A, 16#9E3779B185EBCA87).
-define(P64B, 16#C2B2AE3D27D4EB4F).
-define(P64C, 16#165667B19E3779F9).
-define(P64D, 16#85EBCA77C2B2AE63).
-define(P64E, 16#27D4EB2F165667C5).

%% The key of the configuration of a bus.
config_key(Prefix) -> pack(Prefix, [0]).

%% The recorder of a bus. Config is the value at config_key/1.
recorder(Prefix, <<?FORMAT:16, Partitions:32, _Incarnation:8>>) when Partitions > 0 -> {ok, {Prefix, Partitions}};
recorder(_Prefix, _Config) -> {error, no_bus_of_this_format}.

%% The partition of a database.
partition({_Prefix, Partitions}, Name) -> xxh3(Name) rem Partitions.

%% The mutations of the transaction. Events says how many times the database was created, deleted and updated, and how many times
%% its design documents were updated (ddoc_updated). Each id in ddocs counts as one more ddoc_updated.
mutations({Prefix, _} = Recorder, Name, Instance, Events, Slot)
  when byte_size(Instance) =:= 16 ->
    Ddocs = maps:get(ddocs, Events, []),
    true = lists:all(fun is_text/1, [Name | Ddocs]),
    [Created, Deleted, Updated, DdocUpdated] =
        [maps:get(Kind, Events, 0) || Kind <- [created, deleted, updated, ddoc_updated]],
    Lanes = [Created, Deleted, Updated, DdocUpdated + length(Ddocs), length(Ddocs)],
    true = lists:all(fun(Lane) -> Lane >= 0 andalso Lane < 1 bsl 32 end, Lanes),
    Database = [1, partition(Recorder, Name), {text, Name}, Instance],
    [{add, pack(Prefix, Database ++ [0, Slot]), << <<Lane:64/little>> || Lane <- Lanes >>}
     | [{set_versionstamped_value, pack(Prefix, Database ++ [2, {text, Ddoc}]), <<0:112>>} || Ddoc <- Ddocs]].

%% Whether the binary can be a name or the id of a design document: 1 to 1,024 bytes of UTF-8.
is_text(Text) -> byte_size(Text) >= 1 andalso byte_size(Text) =< 1024 andalso unicode:characters_to_binary(Text) =:= Text.

%% The mutation that wakes the notifier. Apply it after the commit, in another transaction.
doorbell({Prefix, _} = Recorder, Name) -> {add, pack(Prefix, [2, partition(Recorder, Name)]), <<1:64/little>>}.

%% The key of a tuple: non-negative integers, {text, UTF8}, and byte strings.
pack(Prefix, Elements) -> iolist_to_binary([Prefix | [element(Element) || Element <- Elements]]).

element(0) -> <<16#14>>;
element(Number) when is_integer(Number) ->
    Digits = binary:encode_unsigned(Number),
    [16#14 + byte_size(Digits), Digits];
element({text, Text}) -> [2, binary:replace(Text, <<0>>, <<0, 255>>, [global]), 0];
element(Bytes) -> [1, binary:replace(Bytes, <<0>>, <<0, 255>>, [global]), 0].

%% 64-bit XXH3 with seed 0, for at most 1,024 bytes.
xxh3(<<>>) -> avalanche64(secret(56) bxor secret(64));
xxh3(Data) when byte_size(Data) =< 3 ->
    N = byte_size(Data),
    Combined = binary:at(Data, 0) bsl 16 bor (binary:at(Data, N bsr 1) bsl 24) bor binary:at(Data, N - 1) bor (N bsl 8),
    <<A:32/little, B:32/little, _/binary>> = secret(),
    avalanche64(Combined bxor A bxor B);
xxh3(Data) when byte_size(Data) =< 8 ->
    N = byte_size(Data),
    H1 = (u32(Data, N - 4) + (u32(Data, 0) bsl 32)) bxor secret(8) bxor secret(16),
    H2 = ?CUT((H1 bxor rotate(H1, 49) bxor rotate(H1, 24)) * 16#9FB21C651E98DF25),
    H3 = ?CUT((H2 bxor ((H2 bsr 35) + N)) * 16#9FB21C651E98DF25),
    H3 bxor (H3 bsr 28);
xxh3(Data) when byte_size(Data) =< 16 ->
    N = byte_size(Data),
    Low = u64(Data, 0) bxor secret(24) bxor secret(32),
    High = u64(Data, N - 8) bxor secret(40) bxor secret(48),
    <<Swapped:64/big>> = <<Low:64/little>>,
    avalanche(N + Swapped + High + fold(Low, High));
xxh3(Data) when byte_size(Data) =< 128 ->
    N = byte_size(Data),
    Mixed = [mix(Data, 16 * I, 32 * I) + mix(Data, N - 16 * (I + 1), 32 * I + 16) || I <- lists:seq(0, (N - 1) div 32)],
    avalanche(N * ?P64A + lists:sum(Mixed));
xxh3(Data) when byte_size(Data) =< 240 ->
    N = byte_size(Data),
    First = avalanche(N * ?P64A + lists:sum([mix(Data, 16 * I, 16 * I) || I <- lists:seq(0, 7)])),
    Rest = [mix(Data, 16 * I, 16 * (I - 8) + 3) || I <- lists:seq(8, N div 16 - 1)],
    avalanche(First + lists:sum(Rest) + mix(Data, N - 16, 119));
xxh3(Data) when byte_size(Data) =< 1024 ->
    N = byte_size(Data),
    Stripes = [{64 * I, 8 * I} || I <- lists:seq(0, (N - 1) div 64 - 1)] ++ [{N - 64, 121}],
    Start = [16#C2B2AE3D, ?P64A, ?P64B, ?P64C, ?P64D, 16#85EBCA77, ?P64E, 16#9E3779B1],
    Acc = lists:foldl(fun(Stripe, Acc) -> accumulate(Data, Stripe, Acc) end, Start, Stripes),
    Folded = [fold(lists:nth(2 * I + 1, Acc) bxor secret(11 + 16 * I), lists:nth(2 * I + 2, Acc) bxor secret(19 + 16 * I))
              || I <- [0, 1, 2, 3]],
    avalanche(N * ?P64A + lists:sum(Folded)).

accumulate(Data, {At, Secret}, Acc) ->
    Values = [u64(Data, At + 8 * I) || I <- lists:seq(0, 7)],
    Keys = [lists:nth(I + 1, Values) bxor secret(Secret + 8 * I) || I <- lists:seq(0, 7)],
    [?CUT(lists:nth(I + 1, Acc) + lists:nth((I bxor 1) + 1, Values) + (Key band 16#FFFFFFFF) * (Key bsr 32))
     || {I, Key} <- lists:zip(lists:seq(0, 7), Keys)].

u64(Data, At) -> <<_:At/binary, Number:64/little, _/binary>> = Data, Number.
u32(Data, At) -> <<_:At/binary, Number:32/little, _/binary>> = Data, Number.
secret(At) -> u64(secret(), At).
rotate(H, Bits) -> ?CUT((H bsl Bits) bor (H bsr (64 - Bits))).
fold(A, B) -> ?CUT(A * B) bxor ((A * B) bsr 64).
mix(Data, At, Secret) -> fold(u64(Data, At) bxor secret(Secret), u64(Data, At + 8) bxor secret(Secret + 8)).

avalanche(Sum) ->
    H1 = ?CUT(Sum),
    H2 = ?CUT((H1 bxor (H1 bsr 37)) * 16#165667919E3779F9),
    H2 bxor (H2 bsr 32).

avalanche64(H1) ->
    H2 = ?CUT((H1 bxor (H1 bsr 33)) * ?P64B),
    H3 = ?CUT((H2 bxor (H2 bsr 29)) * ?P64C),
    H3 bxor (H3 bsr 32).

secret() ->
    <<16#b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e:1536>>.

%% Answers lines of words, with byte strings as "x" and hexadecimal digits: "hash NAME", or "record PREFIX CONFIG NAME INSTANCE SLOT CREATED
%% DELETED UPDATED DDOC_UPDATED DDOC...".
main(_Arguments) -> loop(io:get_line("")).

loop(eof) -> ok;
loop(Line) ->
    io:put_chars([answer(string:lexemes(Line, " \n")), "\n"]),
    loop(io:get_line("")).

answer(["hash", Name]) -> io_lib:format("~16.16.0b", [xxh3(bytes(Name))]);
answer(["record", Prefix, Config, Name, Instance, Slot | Rest]) ->
    {Lanes, Ddocs} = lists:split(4, Rest),
    Counts = maps:from_list(lists:zip([created, deleted, updated, ddoc_updated], [list_to_integer(Lane) || Lane <- Lanes])),
    case recorder(bytes(Prefix), bytes(Config)) of
        {error, _} -> "refused";
        {ok, Recorder} ->
            Events = Counts#{ddocs => [bytes(Ddoc) || Ddoc <- Ddocs]},
            case catch mutations(Recorder, bytes(Name), bytes(Instance), Events, list_to_integer(Slot)) of
                {'EXIT', _} -> "refused";
                Mutations ->
                    [hex(config_key(bytes(Prefix)))
                     | [[" ", atom_to_list(Op), " ", hex(Key), " ", hex(Operand)]
                        || {Op, Key, Operand} <- Mutations ++ [doorbell(Recorder, bytes(Name))]]]
            end
    end.

bytes([$x | Digits]) -> << <<(list_to_integer([A, B], 16))>> || {A, B} <- pairs(Digits) >>.
pairs([A, B | Rest]) -> [{A, B} | pairs(Rest)];
pairs([]) -> [].
hex(Bytes) -> [io_lib:format("~2.16.0b", [Byte]) || <<Byte>> <= Bytes].
