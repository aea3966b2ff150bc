/* MPI's all_reduce, and send and receive there and back: prints seconds per call as JSON.
   backend.py, whose sizes and counts it uses, compiles and runs it if MPI is installed. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char** argv) {
  int rank, repeats = argc > 1 ? atoi(argv[1]) : 5;
  const long sizes[] = {8, 4096, 65536, 1 << 20, 1 << 24, 1 << 26};
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  float* x = malloc(1 << 26);
  memset(x, 0, 1 << 26);
  if (rank == 0) printf("SAMPLES {");
  for (int s = 0; s < 6; ++s) {
    const int count = sizes[s] / sizeof(float), calls = sizes[s] <= 65536 ? 2000 : (1 << 27) / sizes[s];
    for (int kind = 0; kind < 2; ++kind) {
      if (rank == 0) printf("%s\"%s %ld\": [", s + kind ? ", " : "", kind ? "there and back" : "all_reduce", sizes[s]);
      for (int r = -1; r < repeats; ++r) { /* the first is a warm-up */
        MPI_Barrier(MPI_COMM_WORLD);
        const double start = MPI_Wtime();
        for (int i = 0; i < calls; ++i) {
          if (kind == 0) {
            MPI_Allreduce(MPI_IN_PLACE, x, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
          } else if (rank == 0) {
            MPI_Send(x, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(x, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
          } else if (rank == 1) {
            MPI_Recv(x, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(x, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
          }
        }
        if (rank == 0 && r >= 0) printf("%s%.9g", r ? ", " : "", (MPI_Wtime() - start) / calls);
      }
      if (rank == 0) printf("]");
    }
  }
  if (rank == 0) printf("}\n");
  MPI_Finalize();
}
